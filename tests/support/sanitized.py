"""The tests of the compiled kernels, whose memory accesses AddressSanitizer checks; `test_addresses` starts this."""

import sys

import pytest

from llamoe.modeling.kernels import cpp_kernels

plain = cpp_kernels.flags_of_processor


def flags() -> list[str] | str:
    found = plain()
    return found if isinstance(found, str) else [*found, "-fsanitize=address", "-fno-omit-frame-pointer"]


cpp_kernels.flags_of_processor = flags
sys.exit(pytest.main(sys.argv[1:]))
