"""Report unreadable input to the client of `transformers serve`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def report_to_client() -> Iterator[None]:
    """Turn a ValueError into status 400 with the error's words while `transformers serve` answers a request.

    The server answers other errors with a bare status 500 and closes the connection. Outside of a server's requests
    the ValueError is raised as it is.

    Raises:
        HTTPException: a ValueError within a request.
    """
    try:
        yield
    except ValueError as error:
        if not _answers_a_request():
            raise
        from fastapi import HTTPException

        raise HTTPException(status_code=400, detail=str(error)) from error


def _answers_a_request() -> bool:
    """Return whether the server's event loop runs; elsewhere in its process callers catch ValueError."""
    if "transformers.cli.serving.server" not in sys.modules:
        return False
    # Imported here, so that `--help` does not load asyncio.
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
