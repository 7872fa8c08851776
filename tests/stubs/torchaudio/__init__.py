from stub_modules import fill

fill(__name__, "transforms", "functional")
