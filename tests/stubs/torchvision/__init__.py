from stub_modules import fill

fill(__name__, "transforms", "transforms.functional", "ops", "models", "models.optical_flow")
