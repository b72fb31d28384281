"""Run the command `llamoe`, and turn errors into messages and exit statuses.

Results go to standard output, as text or with `--json` as JSON; progress and errors go to standard error. Exit status:
0 for success, 1 if `verify` finds different models, 2 for wrong options or an unusable source, 3 if reading or writing
failed, 130 if interrupted.
"""

import json
import sys
from typing import NoReturn

# Importing these modules registers their commands.
from . import chat_command, doctor_command, read_commands, write_commands  # noqa: F401
from .app import app

_INTERRUPTED = "interrupted; --resume continues a folder that was being written"
# Commands that write no folder, so that --resume does not apply.
_WRITE_NOTHING = ("chat", "doctor", "inspect", "verify")


def main(args: list[str] | None = None) -> None:
    """Run the command and exit with its status."""
    given = sys.argv[1:] if args is None else args
    # Searched here, since errors are printed as JSON even if the options cannot be parsed.
    as_json = "--json" in given
    interrupted = "interrupted" if given and given[0] in _WRITE_NOTHING else _INTERRUPTED
    try:
        app(given)
    except SystemExit as end:
        if end.code == 130:
            _fail(interrupted, 130, as_json)
        if end.code == 2 and as_json:
            print(json.dumps({"error": "wrong options; standard error says which", "status": 2}))
        raise
    except ValueError as error:
        _fail(error, 2, as_json)
    except OSError as error:
        reason = error.strerror or str(error)
        _fail(f"{error.filename}: {reason}" if error.filename else reason, 3, as_json)
    except (ImportError, RuntimeError, MemoryError) as error:
        _fail(str(error) or type(error).__name__, 3, as_json)
    except KeyboardInterrupt:
        _fail(interrupted, 130, as_json)


def _fail(error: object, status: int, as_json: bool) -> NoReturn:
    message = " ".join(str(error).split())
    if as_json:
        print(json.dumps({"error": message, "status": status}))
    print(f"llamoe: {message}", file=sys.stderr)
    sys.exit(status)
