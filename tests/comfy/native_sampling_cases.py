"""The cases that native_sampling.py records and test_native_parity.py compares."""
DISTILLED = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0]
STAGE2 = [0.909375, 0.725, 0.421875, 0.0]
# frames, height, width are of the video latent; audio: latent frames or 0; start: a non-zero latent goes in;
# text_tokens > 0: raw projections of so many tokens, the connectors run; < 0: that many tokens of finished context.
# mask: which noise mask goes in. guides: what LTXVAddGuide appends, in this order; a slot is a keyframe that is to be
# generated, as `generated_keyframes` names it. voice: latent frames of a reference sound, `ref_audio`. cfg: CFG with a
# negative prompt.
# flavour: of the checkpoint. "2.3" runs on every ComfyUI, "2.5" from 0.32 on.
CASES = {
    "euler": dict(sampler="euler", sigmas=DISTILLED, batch=1, video=(3, 2, 3), audio=17,
                  frame_rate=24.0, text_tokens=37, start=False),
    "ancestral": dict(sampler="euler_ancestral", sigmas=DISTILLED, batch=1, video=(3, 2, 3), audio=17, frame_rate=24.0,
                      text_tokens=-16, start=False),
    "stage2": dict(sampler="euler_ancestral", sigmas=STAGE2, batch=1, video=(2, 4, 2), audio=9, frame_rate=25.0,
                   text_tokens=-16, start=True),
    "unfinished": dict(sampler="euler", sigmas=DISTILLED[:6], batch=1, video=(2, 2, 2), audio=9, frame_rate=24.0,
                       text_tokens=-16, start=False),
    "batch": dict(sampler="euler_ancestral", sigmas=DISTILLED, batch=2, video=(2, 2, 3), audio=9, frame_rate=24.0,
                  text_tokens=-16, start=False),
    "video_only": dict(sampler="euler_ancestral", sigmas=DISTILLED, batch=1, video=(3, 2, 3), audio=0, frame_rate=24.0,
                       text_tokens=-16, start=False),
    "mask_by_frame": dict(sampler="euler", sigmas=DISTILLED, batch=1, video=(3, 2, 3), audio=9, frame_rate=24.0,
                          text_tokens=-16, start=True, mask="frames"),
    "mask_in_space": dict(sampler="euler_ancestral", sigmas=STAGE2, batch=2, video=(2, 3, 4), audio=9, frame_rate=24.0,
                          text_tokens=-16, start=True, mask="space"),
    "mask_resized": dict(sampler="euler_ancestral", sigmas=STAGE2, batch=1, video=(3, 2, 4), audio=9, frame_rate=24.0,
                         text_tokens=-16, start=True, mask="larger"),
    "frozen_audio": dict(sampler="euler_ancestral", sigmas=DISTILLED, batch=1, video=(2, 2, 3), audio=9,
                         frame_rate=24.0, text_tokens=-16, start=True, mask="audio frozen"),
    "guides": dict(sampler="euler", sigmas=DISTILLED, batch=1, video=(3, 2, 4), audio=9, frame_rate=24.0,
                   text_tokens=-16, start=False,
                   guides=[dict(frame=0, frames=1, strength=0.7), dict(frame=1, frames=2, strength=1.0)]),
    "guide_masks": dict(sampler="euler_ancestral", sigmas=STAGE2, batch=1, video=(3, 4, 4), audio=9, frame_rate=24.0,
                        text_tokens=-16, start=True, mask="frames",
                        guides=[dict(frame=8, frames=1, strength=1.5, attention_mask=1),
                                dict(frame=0, frames=3, strength=0.4, attention_mask=11)]),
    "small_guide": dict(sampler="euler", sigmas=STAGE2, batch=1, video=(3, 2, 4), audio=0, frame_rate=30.0,
                        text_tokens=-16, start=True,
                        guides=[dict(frame=0, frames=1, strength=1.0),
                                dict(frame=0, frames=3, strength=0.8, downscale=2)]),
    "cfg": dict(sampler="euler", sigmas=STAGE2, batch=1, video=(2, 2, 3), audio=9, frame_rate=24.0, text_tokens=-16,
                start=True, cfg=3.0),
    "voice": dict(sampler="euler_ancestral", sigmas=DISTILLED, batch=1, video=(3, 2, 3), audio=17, frame_rate=24.0,
                  text_tokens=-16, start=False, voice=6),
    "voice_and_masks": dict(sampler="euler", sigmas=STAGE2, batch=2, video=(3, 2, 3), audio=9, frame_rate=24.0,
                            text_tokens=-16, start=True, mask="frames", voice=1, cfg=3.0),
    "ltx25": dict(flavour="2.5", sampler="euler_ancestral", sigmas=DISTILLED, batch=1, video=(3, 2, 3), audio=17,
                  frame_rate=24.0, text_tokens=37, start=False),
    "ltx25_video_only": dict(flavour="2.5", sampler="euler", sigmas=STAGE2, batch=1, video=(3, 2, 3), audio=0,
                             frame_rate=24.0, text_tokens=-16, start=True),
    "ltx25_guides": dict(flavour="2.5", sampler="euler", sigmas=DISTILLED, batch=1, video=(3, 2, 4), audio=9,
                         frame_rate=24.0, text_tokens=-16, start=False,
                         guides=[dict(frame=0, frames=1, strength=0.7), dict(frame=16, frames=1, strength=0.7)]),
    "kept_in_part": dict(flavour="2.5", sampler="euler", sigmas=STAGE2, batch=2, video=(2, 2, 3), audio=9,
                         frame_rate=24.0, text_tokens=-16, start=True, mask="all in part"),
    "slots": dict(flavour="2.5", sampler="euler_ancestral", sigmas=DISTILLED, batch=1, video=(3, 2, 4), audio=9,
                  frame_rate=24.0, text_tokens=-16, start=False, guides=[dict(slot=5), dict(slot=12)]),
    "slots_and_guides": dict(flavour="2.5", sampler="euler_ancestral", sigmas=STAGE2, batch=2, video=(3, 2, 4),
                             audio=9, frame_rate=25.0, text_tokens=-16, start=True, mask="frames",
                             guides=[dict(frame=0, frames=3, strength=0.8, downscale=2), dict(slot=4), dict(slot=11),
                                     dict(frame=8, frames=1, strength=0.6)]),
}
SEED = 1234
