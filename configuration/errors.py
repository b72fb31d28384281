"""The errors that all packages raise: a bad configuration, a bad file; and how a server's client learns of one."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class ConfigurationError(ValueError):
    """A field that contradicts itself or another one; it is a `ValueError`."""


class CheckpointError(OSError, ValueError, RuntimeError):
    """A checkpoint's file is missing, damaged, hostile, or does not fit the model.

    It is caught as an `OSError`, which transformers raises for files, as the `ValueError` of a bad argument, and as the
    `RuntimeError` which torch and transformers raise for weights of another shape.
    """


@contextmanager
def told_to_clients() -> Iterator[None]:
    """Context in which a ValueError reaches the client of `transformers serve`, as status 400 with the error's words.

    The server answers an error with a bare 500 and closes the connection. FastAPI, by which it answers, passes on the
    words of its own `HTTPException` alone. Outside of a server's requests the error stays what it is.

    Raises:
        HTTPException: a ValueError, while `transformers serve` answers a request.
    """
    try:
        yield
    except ValueError as error:
        if not _answers_a_client():
            raise
        from fastapi import HTTPException

        raise HTTPException(status_code=400, detail=str(error)) from error


def _answers_a_client() -> bool:
    # Requests are handled on an event loop. Elsewhere in the server's process, a test's say, callers catch ValueError.
    if "transformers.cli.serving.server" not in sys.modules:
        return False
    # The command's help does without it.
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
