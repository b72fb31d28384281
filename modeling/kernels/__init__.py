"""Products that PyTorch has no fast form of, as Triton kernels, each beside a plain version of the same function.

Reading order: few_rows_triton, few_rows, trial, trust. Files named `…_triton` import Triton, which is not installed
everywhere and takes long to import; the others import it when a kernel is about to run, never before.
"""
