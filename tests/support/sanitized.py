"""Run tests with CPU kernels that are compiled with AddressSanitizer, which ends the process on a wrong access.

The arguments are pytest's; `test_addresses` runs this program.
"""

import sys

import pytest

from llamoe.modeling.kernels import cpp_kernels

flags_of_processor = cpp_kernels.flags_of_processor


def flags() -> list[str] | str:
    """Return the compiler's flags with AddressSanitizer, or the reason why the processor has no kernels."""
    flags = flags_of_processor()
    return flags if isinstance(flags, str) else [*flags, "-fsanitize=address", "-fno-omit-frame-pointer"]


cpp_kernels.flags_of_processor = flags
sys.exit(pytest.main(sys.argv[1:]))
