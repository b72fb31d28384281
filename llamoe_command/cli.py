"""Run the command `llamoe`, and turn errors into messages and exit statuses.

Results go to standard output, as text, or as JSON with `--json`. Progress and errors go to standard error. The exit
status is 0 for success, 1 if `verify` finds different models, 2 for wrong options or an unusable source, 3 if reading
or writing failed, and 130 after Ctrl-C.
"""

import json
import sys
from typing import NoReturn

# Importing these modules registers their commands.
from . import chat_command, doctor_command, read_commands, write_commands  # noqa: F401
from .app import app

# Commands that write no folder, and have no option --resume.
_WRITE_NOTHING = ("chat", "doctor", "inspect", "verify")


def main(args: list[str] | None = None) -> None:
    """Run the command and exit with its status."""
    words = sys.argv[1:] if args is None else args
    # Found without the parser, since errors are printed as JSON even if the options cannot be parsed.
    as_json = "--json" in words
    interrupted = "interrupted"
    if words and words[0] not in _WRITE_NOTHING:
        interrupted += "; --resume continues a folder that was being written"
    try:
        app(words)
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
    """Print an error as one line to standard error, and as JSON if asked for; exit with the status."""
    message = " ".join(str(error).split())
    if as_json:
        print(json.dumps({"error": message, "status": status}))
    print(f"llamoe: {message}", file=sys.stderr)
    sys.exit(status)
