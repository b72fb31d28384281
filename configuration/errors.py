"""The errors that all packages raise: a bad configuration, a bad file."""


class ConfigurationError(ValueError):
    """A field that contradicts itself or another one; it is a `ValueError`."""


class CheckpointError(OSError, ValueError, RuntimeError):
    """A checkpoint's file is missing, damaged, hostile, or does not fit the model.

    It is caught as an `OSError`, which transformers raises for files, as the `ValueError` of a bad argument, and as the
    `RuntimeError` which torch and transformers raise for weights of another shape.
    """
