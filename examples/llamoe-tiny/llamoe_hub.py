"""Lets transformers load this folder with `trust_remote_code=True`.

The model's code is not here: it is the installed package llamoe.
"""

try:
    import llamoe
except ModuleNotFoundError as error:
    if error.name != "llamoe":
        raise
    raise ImportError(
        "This folder holds a llamoe model, and the package llamoe is not installed: pip install llamoe"
    ) from error


def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(name)
    if not hasattr(llamoe, name):
        raise ImportError(
            f"This folder needs {name}, which llamoe {llamoe.__version__} does not have: pip install -U llamoe"
        )
    return getattr(llamoe, name)
