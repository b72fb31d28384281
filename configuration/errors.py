"""The errors that all packages raise, for a wrong configuration or a bad file."""


class ConfigurationError(ValueError):
    """A `ValueError` for a configuration's field that is invalid, or that contradicts another field."""


class CheckpointError(OSError, ValueError, RuntimeError):
    """An error for a checkpoint's file that is missing, damaged or hostile, or does not fit the model.

    Code that catches the errors of other libraries catches this one, too: transformers raises an `OSError` for files,
    torch and transformers raise a `RuntimeError` for weights of another shape, and a bad argument is a `ValueError`.
    """
