"""The video VAE of one file: latents in, frames out.

Reading order: `VideoVAE.decode`, `_chunks`. The decoder, conv or diffusion, is behind decoders.py: its network, and the
plan that cuts a clip so that it fits. Which pieces of a decode run as CUDA graphs is decided in recording.py.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ..checkpoint import CheckpointHeader, Progress, read_header, require_component
from ..config import ConvVAEConfig, DiffusionVAEConfig
from ..cuda_graph import GraphCache, note_graphs, unavailable_reason
from ..errors import NonFiniteError, RequestError, ShapeError
from ..memory import DeviceMemoryError, available_host_bytes, device_free_bytes, in_words, is_out_of_memory
from ..resident_weights import ResidentModule
from ..shapes import SPACE_FACTOR, TIME_FACTOR, VideoLatentShape
from ..step_runner import CUDA_GRAPH_MODES
from ..timing import Phase, Timeline
from ..triton_use import note_first_use, triton_refusal
from .decoders import decoding_of
from .diffusion_grid import COMFYUI_NOISE, DecodeNoise
from .host_frames import FrameTransfer, allocate_frames, frames_bytes, to_frames
from .in_flight import Pace, PhasesInFlight
from .plan import PLANNED, AskedSizes, DecodePlan
from .recording import PieceRecorder
from .statistics import PerChannelStatistics, load_statistics
from .tiling import TileOverlaps

PHASE = "decode.video.chunk"
COMPONENTS = ("video_vae_diffusion", "video_vae_conv")
# In whose phases pieces are recorded: decode.video.warmup and decode.video.capture.
_RECORDING_PHASES = "decode.video"
# A long stream has up to six kinds of pieces, a decode in tiles up to twelve.
_MAX_GRAPHS = 16

Result = TypeVar("Result")


def load_video_vae(
    path: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    on_progress: Progress | None = None,
    timeline: Timeline | None = None,
) -> VideoVAE:
    """Open a video VAE file, conv or diffusion, and place its decoder on the device.

    dtype None keeps the file's dtypes; it is also the dtype of the activations. on_progress(done_bytes, total_bytes).
    Raises CheckpointError, also for a VAE of the 2.0 generation.
    """
    vae = VideoVAE(read_header(path), device=device, dtype=dtype)
    vae.ensure_resident(timeline, on_progress)
    return vae


class VideoVAE(ResidentModule):
    """The decoder of one file, conv or diffusion. The file's encoder has a handle of its own, VideoEncoder.

    graphs: recorded pieces of decodes.
    """

    def __init__(self, header: CheckpointHeader, *, device: torch.device | str, dtype: torch.dtype | None = None):
        """Checks the header; the weights are read by ensure_resident, at the latest in decode."""
        component = require_component(header, *COMPONENTS)
        self._decoding = decoding_of(header, component, device, dtype)
        self._prefix = header.prefixes[component]
        prefix_map = {part: self._prefix + part for part in self._decoding.parts(header)}
        super().__init__(header, self._decoding.build, prefix_map, device=device, dtype=dtype)
        weight = header.tensors[self._prefix + self._decoding.first_weight]
        self._item_bytes = dtype.itemsize if dtype else weight.num_bytes // weight.num_elements
        self.graphs = GraphCache(self.device, max_graphs=_MAX_GRAPHS)

    def evict(self) -> None:
        self.graphs.close()
        # Where memory is so short that it leaves with every render, a recording would never be replayed.
        self.graphs.forget_measurements()
        super().evict()

    @property
    def config(self) -> ConvVAEConfig | DiffusionVAEConfig:
        return self._decoding.config

    @property
    def takes_noise(self) -> bool:
        """Whether a decode starts from noise."""
        return isinstance(self.config, DiffusionVAEConfig)

    def statistics(self) -> PerChannelStatistics:
        """Mean and deviation of the latents on the device, read by themselves: the decoder need not be resident."""
        return load_statistics(self.header, self._prefix, self.config.latent_channels, self.device)

    def plan(
        self,
        latent_shape: Sequence[int],
        free_bytes: int | None = None,
        *,
        sizes: AskedSizes = PLANNED,
        clips_kept: int = 0,
    ) -> DecodePlan:
        """How a latent of this shape would be decoded now.

        free_bytes: device memory to stay within; None asks the device. clips_kept: so many decoded clips, raw and as
        frames, will lie on the device beside the decode. Raises ShapeError for a latent that this VAE can't decode.
        """
        shape = self._check_shape(latent_shape)
        if free_bytes is None:
            free_bytes = self._free_bytes(shape)
        if free_bytes is not None:
            # Recordings make way, and what is planned must not depend on them.
            free_bytes += self.graphs.device_bytes - self.graphs.seemingly_free_bytes
            values = 3 * shape.batch * shape.num_frames * shape.height * shape.width * SPACE_FACTOR**2
            free_bytes = max(0, free_bytes - clips_kept * values * (self._item_bytes + torch.float32.itemsize))
        return self._decoding.plan(
            shape.as_tuple(), item_bytes=self._item_bytes, free_bytes=free_bytes, asked=sizes
        )

    def exact_bytes(
        self, latent_shape: Sequence[int], *, sizes: AskedSizes = PLANNED, recorded: bool = False
    ) -> int:
        """Device memory beside the weights that the smallest plan takes which gives the untiled picture, or that of the
        tiles asked for: what is worth having room made for. recorded: with the recording of a piece. Raises
        ShapeError."""
        shape = self._check_shape(latent_shape).as_tuple()
        least = self._decoding.exact_bytes(shape, item_bytes=self._item_bytes, asked=sizes)
        if not recorded:
            return least
        plan = self._decoding.plan(shape, item_bytes=self._item_bytes, free_bytes=least, asked=sizes)
        # Recordings that are held are replayed, or make way.
        return least + max(0, plan.recording_bytes - self.graphs.device_bytes)

    def overlaps(self, latent_shape: Sequence[int], plan: DecodePlan) -> TileOverlaps | None:
        """Where the tiles of a plan for a latent of this shape overlap in its frames; None without tiles.

        Raises ShapeError.
        """
        shape = self._check_shape(latent_shape)
        return None if plan.tiling is None else self._decoding.overlaps(shape.as_tuple(), plan.tiling)

    def decode(
        self,
        latent: Tensor,
        *,
        plan: DecodePlan | None = None,
        sizes: AskedSizes = PLANNED,
        noise: DecodeNoise = COMFYUI_NOISE,
        cuda_graph: str = "auto",
        graphs_refused: str = "",
        timeline: Timeline | None = None,
        free_bytes: int | None = None,
        check_cancelled: Callable[[], None] | None = None,
        on_plan: Callable[[DecodePlan], None] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        """Decode to frames on the host, in ComfyUI's IMAGE layout.

        latent: (B, C, F, H, W) float, normalised, on any device. Returns (B*(8(F-1)+1), 32H, 32W, 3) float32 in [0, 1].
        plan: run exactly this plan; without one it is planned now, with the sizes that the user asked for, and planned
        smaller when the device runs out of memory all the same.
        noise: of the diffusion decoder; the conv decoder takes none.
        cuda_graph: "off"; "on": each piece (a clip that runs whole, a chunk, a tile) is recorded at its first use and
        replayed after; "auto": at its third, where the host was the limit at the second. The bits are the same. What
        was done, and why, is noted in the timeline.
        graphs_refused: why the host forbids CUDA graphs, empty when it doesn't.
        free_bytes: device memory that a plan may count on, None asks the device.
        check_cancelled: called before every chunk and, where one takes long, every hundredth of the work; whatever it
        raises ends the decode within two such pieces and leaves the VAE usable. A replay runs to its end, so during
        one neither cancel nor progress comes.
        on_plan: called with every plan before it is tried; the last is what ran.
        on_progress(done, total): frames on the host, or as many as the work done amounts to. It goes back when memory
        runs out and a smaller plan begins.
        While a chunk is copied to the host, the device computes the next one.
        Raises ShapeError and RequestError (host memory, noise, cuda_graph) before any work, CheckpointError,
        NonFiniteError naming the chunk, DeviceMemoryError, and RestartRequiredError when the process can't go on.
        Source: video_vae.md sections 3, 5, 6, 7.
        """
        shape = self._check_shape(latent.shape)
        graphs = _GraphsWanted(cuda_graph, graphs_refused)
        total = shape.batch * shape.num_frames
        size = (shape.height * SPACE_FACTOR, shape.width * SPACE_FACTOR)
        host = allocate_frames(total, *size, available_host_bytes())
        timeline = timeline or Timeline(None, device=self.device)
        progress = _Progress(total, on_progress)

        def run(latent: Tensor, plan: DecodePlan, recorder: PieceRecorder | None) -> Tensor:
            in_flight = PhasesInFlight(timeline, PHASE)
            progress.restart()
            pace = Pace(self.device, check_cancelled or _no_check, progress.share)

            def deliver(chunk: _Chunk, frames: Tensor, ready: torch.cuda.Event | None) -> None:
                in_flight.end(chunk.phase)
                bytes_moved = frames.numel() * frames.element_size()
                with transfer.on_its_stream(), timeline.phase("transfer.to_host", chunk=chunk.index, bytes=bytes_moved):
                    transfer.write(frames, chunk.row, ready)
                progress.frames(chunk.row + frames.shape[0])

            ranges = []
            behind = None
            with in_flight:
                for chunk in self._chunks(latent, plan, noise, in_flight, pace, recorder):
                    ranges.append(chunk.value_range())
                    frames = to_frames(chunk.pixels)
                    chunk.pixels = None  # room for the next chunk
                    chunk.phase.issued()
                    issued = (chunk, frames, transfer.mark_ready())
                    if behind is not None:
                        deliver(*behind)
                    behind = issued
                deliver(*behind)
            _check_finite(ranges)
            return host

        with FrameTransfer(host, self.device) as transfer:
            return self._with_plan(latent, plan, sizes, noise, graphs, free_bytes, timeline, run, on_plan)

    def decode_raw(
        self,
        latent: Tensor,
        *,
        plan: DecodePlan | None = None,
        sizes: AskedSizes = PLANNED,
        noise: DecodeNoise = COMFYUI_NOISE,
        cuda_graph: str = "auto",
        graphs_refused: str = "",
        timeline: Timeline | None = None,
        check_cancelled: Callable[[], None] | None = None,
    ) -> Tensor:
        """As decode, but the decoder's own output: (B, 3, 8(F-1)+1, 32H, 32W) unclamped, nominally in [-1, 1], in the
        activation dtype, on the device."""
        timeline = timeline or Timeline(None, device=self.device)

        def run(latent: Tensor, plan: DecodePlan, recorder: PieceRecorder | None) -> Tensor:
            pace = Pace(self.device, check_cancelled or _no_check, on_share=lambda share: None)
            clips: list[list[Tensor]] = [[] for _ in range(latent.shape[0])]
            ranges = []
            with PhasesInFlight(timeline, PHASE) as in_flight:
                for chunk in self._chunks(latent, plan, noise, in_flight, pace, recorder):
                    ranges.append(chunk.value_range())
                    clips[chunk.item].append(chunk.pixels)
                    in_flight.end(chunk.phase)
            _check_finite(ranges)
            return torch.cat([torch.cat(pieces, dim=2) for pieces in clips])

        graphs = _GraphsWanted(cuda_graph, graphs_refused)
        return self._with_plan(latent, plan, sizes, noise, graphs, None, timeline, run)

    def _with_plan(
        self,
        latent: Tensor,
        plan: DecodePlan | None,
        sizes: AskedSizes,
        noise: DecodeNoise,
        graphs: _GraphsWanted,
        free_bytes: int | None,
        timeline: Timeline,
        run: Callable[[Tensor, DecodePlan, PieceRecorder | None], Result],
        on_plan: Callable[[DecodePlan], None] | None = None,
    ) -> Result:
        """Check the latent, bring the weights, and run a plan; one made here gives way when memory runs out."""
        self._decoding.check_noise(noise, self._check_shape(latent.shape).as_tuple())
        self.ensure_resident(timeline)
        with torch.inference_mode():
            latent = latent.to(self.device)
            bad = latent.numel() - int(torch.isfinite(latent).sum())
            if bad:
                count = latent.numel()
                raise NonFiniteError(
                    PHASE, f"{bad} of {count} values of the latent are NaN or Inf, so what made the latent failed."
                )
            may_shrink = plan is None
            plan = plan or self.plan(latent.shape, free_bytes, sizes=sizes)
            backend = self._decoding.backend(self.device, self.module.dtype)
            if backend:
                timeline.note(PHASE, backend)
            if triton_refusal(self.device, self.module.dtype, self._decoding.triton_owner) is None:
                note_first_use(self._decoding.triton_owner, timeline, PHASE)
            mode = graphs.mode_on(self.device, timeline)
            self._make_room(plan, timeline)
            while True:
                timeline.note(PHASE, plan.reason, chunk_latent_frames=plan.chunk_frames, peak_bytes=plan.peak_bytes)
                if on_plan is not None:
                    on_plan(plan)
                recorder = None if mode == "off" else self._recorder(mode, plan, timeline, backend)
                try:
                    result = run(latent, plan, recorder)
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    failure = error.with_traceback(None)  # whose frames keep the failed run's memory
                else:
                    if recorder is not None:
                        note_graphs(timeline, PHASE, recorder.finish(), eager=recorder.ran_eager)
                    return result
                if mode != "off":
                    note_graphs(timeline, PHASE, "eager, out of memory before", eager=True)
                mode, recorder = "off", None
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()  # cuDNN, cuBLAS and Triton take theirs from the device itself
                if len(self.graphs):
                    # The same plan again: it may have had room without them.
                    held = in_words(self.graphs.device_bytes)
                    self.graphs.close()
                    note_graphs(timeline, PHASE, f"out of memory beside recordings of {held}: dropped, once more")
                    continue
                smaller = None
                if may_shrink:
                    smaller = self._decoding.smaller(latent.shape, plan, item_bytes=self._item_bytes)
                if smaller is None:
                    raise DeviceMemoryError(self._out_of_memory(plan, failure, may_shrink)) from failure
                plan = smaller

    def _make_room(self, plan: DecodePlan, timeline: Timeline) -> None:
        """Drop recordings where an eager run of this plan would have too little memory beside them."""
        free = self._free_beside_recordings()
        if len(self.graphs) and free is not None and free < plan.peak_bytes:
            held = in_words(self.graphs.device_bytes)
            self.graphs.close()
            note_graphs(timeline, PHASE, f"recordings of {held} dropped, to make room")

    def _free_beside_recordings(self) -> int | None:
        free = device_free_bytes(self.device)
        return None if free is None else free - self.graphs.seemingly_free_bytes

    def _recorder(self, mode: str, plan: DecodePlan, timeline: Timeline, backend: str) -> PieceRecorder:
        refusal = triton_refusal(self.device, self.module.dtype, self._decoding.triton_owner)
        return PieceRecorder(
            self.graphs,
            mode,
            plan,
            generation=self.generation,
            kernels=f"{backend}; Triton: {refusal}",
            free_bytes=self._free_beside_recordings,
            timeline=timeline,
            phase=_RECORDING_PHASES,
        )

    def _out_of_memory(self, plan: DecodePlan, failure: RuntimeError, planned: bool) -> str:
        free = device_free_bytes(self.device)
        weights = in_words(self.weights_bytes)
        has = "" if free is None else f"; {in_words(free)} are free beside the {weights} of weights"
        if planned:
            remedy = "Nothing smaller is planned. Decode a smaller picture or fewer frames, or free device memory."
        else:
            remedy = "This plan was asked for; without it smaller ones are tried."
        reason = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
        return f"{PHASE}: out of device memory with {plan.reason}{has}. {remedy} The device said: {reason}"

    def _chunks(
        self,
        latent: Tensor,
        plan: DecodePlan,
        noise: DecodeNoise,
        in_flight: PhasesInFlight,
        pace: Pace,
        recorder: PieceRecorder | None,
    ) -> Iterator[_Chunk]:
        """Issue chunk after chunk, clip by clip; a chunk's phase is open when it comes out. The host waits for the
        device only inside a chunk that takes long, see Pace, and when a piece is recorded."""
        clip_frames = (latent.shape[2] - 1) * TIME_FACTOR + 1
        clips = latent.shape[0]
        index = 0
        for item in range(clips):
            issued = partial(pace.issued, item, clips)
            if recorder is not None:
                issued = recorder.not_timed(issued)
            pieces = self._decoding.pieces(self.module, latent, item, plan, noise, issued, recorder)
            frame = 0
            while frame < clip_frames:
                pace.check_cancelled()
                phase = in_flight.begin(chunk=index, item=item, frame=frame)
                chunk = _Chunk(index, item, frame, item * clip_frames + frame, next(pieces), phase)
                count = phase.attrs["frames"] = chunk.pixels.shape[2]
                yield chunk
                frame += count
                index += 1

    def _check_shape(self, latent_shape: Sequence[int]) -> VideoLatentShape:
        sizes = tuple(latent_shape)
        wanted = self.config.latent_channels
        if len(sizes) != 5:
            what = "an image latent or a latent of another model" if len(sizes) == 4 else "no video latent"
            raise ShapeError(
                f"this latent has {len(sizes)} dimensions {sizes}, the LTX-2.5 video VAE takes 5: "
                f"(batch, {wanted}, frames, height, width). It is {what}; connect the video latent of an LTX sampler."
            )
        if sizes[1] != wanted:
            raise ShapeError(
                f"this latent has {sizes[1]} channels; the LTX-2.5 VAE wants {wanted}. "
                "Connect the video latent of an LTX sampler, or pick the VAE that belongs to this latent."
            )
        if 0 in sizes:
            raise ShapeError(f"this latent is empty: {sizes}.")
        return VideoLatentShape(*sizes)

    def _free_bytes(self, shape: VideoLatentShape) -> int | None:
        """Memory that a decode may take on this device, None where nothing tells it."""
        free = device_free_bytes(self.device)
        if free is None:
            return None
        if self.device.type != "cuda":
            height, width = shape.height * SPACE_FACTOR, shape.width * SPACE_FACTOR
            free -= frames_bytes(shape.batch * shape.num_frames, height, width)  # they lie in the same memory
        return max(0, free - (0 if self.resident else self.weights_bytes))


def _no_check() -> None:
    return None


@dataclass(frozen=True)
class _GraphsWanted:
    """mode, refused: see VideoVAE.decode, cuda_graph and graphs_refused. Raises RequestError."""

    mode: str
    refused: str

    def __post_init__(self) -> None:
        if self.mode not in CUDA_GRAPH_MODES:
            raise RequestError(f"cuda_graph={self.mode!r} is not one of {', '.join(CUDA_GRAPH_MODES)}.")

    def mode_on(self, device: torch.device, timeline: Timeline) -> str:
        """The mode, "off" where there can be no graphs; for "on" a note then says why."""
        reason = "" if self.mode == "off" else self.refused or unavailable_reason(device)
        if reason and self.mode == "on":
            note_graphs(timeline, PHASE, f"eager, {reason}", eager=True)
        return "off" if reason else self.mode


class _Progress:
    """Frames done, of all: those on the host, or more where a decoder tells of work before its frames come out."""

    def __init__(self, total: int, report: Callable[[int, int], None] | None) -> None:
        self._total = total
        self._report = report
        self._done = 0

    def restart(self) -> None:
        if self._done:
            self._done = 0
            self._tell()

    def share(self, done: float) -> None:
        self.frames(int(done * self._total))

    def frames(self, done: int) -> None:
        if done > self._done:
            self._done = done
            self._tell()

    def _tell(self) -> None:
        if self._report is not None:
            self._report(self._done, self._total)


@dataclass
class _Chunk:
    """index: of the chunk in this decode. frame: its first frame in clip `item`. row: the same in the whole batch.
    pixels: (1, 3, n, Hpx, Wpx), unclamped, possibly still being computed."""

    index: int
    item: int
    frame: int
    row: int
    pixels: Tensor | None
    phase: Phase

    def value_range(self) -> tuple[str, Tensor]:
        """(words for the place, smallest and largest value); NaN anywhere makes both NaN. Stays on the device."""
        end = self.frame + self.pixels.shape[2]
        place = f"chunk {self.index}, frames {self.frame} to {end - 1} of clip {self.item}"
        return place, torch.stack(torch.aminmax(self.pixels))


def _check_finite(ranges: list[tuple[str, Tensor]]) -> None:
    """One read for all chunks, after they are done."""
    finite = torch.stack([values for _, values in ranges]).isfinite().all(dim=1).tolist()
    bad = [place for (place, _), good in zip(ranges, finite) if not good]
    if bad:
        more = f" and {len(bad) - 1} more of {len(ranges)} chunks" if len(bad) > 1 else ""
        raise NonFiniteError(
            PHASE,
            f"NaN or Inf in {bad[0]}{more}. The latent is finite, so the decoder overflowed: its file is damaged, or "
            "the latent is far out of range.",
        )
