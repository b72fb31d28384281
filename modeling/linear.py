"""A linear layer that reads its weight at the speed of the memory when a CPU decodes.

The next token of a few rows is a product of a matrix and hardly more than a vector: all of its time goes into reading
the matrix. MKL's matrix product, which torch calls, reaches half of that speed. Its batched product reaches nearly all
of it, so here the weight's rows are cut into a batch. Measured on an AMD EPYC in float32: one row takes half the time
on one thread and a third on two; in 16 bits both are alike.
"""

import torch
from torch import nn

# With more rows the gain shrinks, with fewer weights the views cost what is gained.
_MAX_ROWS = 3
_MIN_WEIGHTS = 1 << 15
# Parts that the rows of a weight can be cut into, the best first: many threads want many.
_PARTS = (64, 16, 8, 4, 2, 3, 5, 7, 11, 13)


class Linear(nn.Linear):
    """`nn.Linear`, and the same numbers up to the order of summation."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map `[..., in_features]` to `[..., out_features]`."""
        weight_OI = self.weight
        if (
            input.numel() > _MAX_ROWS * self.in_features
            or type(input) is not torch.Tensor
            or type(weight_OI) is not nn.Parameter  # sharded or quantized
            or not (input.dtype == weight_OI.dtype == torch.float32)
            or not (input.is_cpu and weight_OI.is_cpu)
            or weight_OI.numel() < _MIN_WEIGHTS
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or torch.is_autocast_enabled("cpu")
            or not torch.backends.mkl.is_available()
        ):
            return super().forward(input)
        return _multiply_in_parts(input, weight_OI, self.bias)


def _multiply_in_parts(x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    num_out, num_in = weight_OI.shape
    parts = next((parts for parts in _PARTS if num_out % parts == 0), None)
    if parts is None or not weight_OI.is_contiguous() or not x.numel():
        return nn.functional.linear(x, weight_OI, bias_O)
    num_rows = x.numel() // num_in
    # Strides as of a transposed matrix, also for one row: by them torch chooses how to call MKL.
    x_PIR = x.contiguous().as_strided((parts, num_in, num_rows), (0, 1, num_in))
    out_POR = torch.bmm(weight_OI.view(parts, -1, num_in), x_PIR)
    shape = (*x.shape[:-1], num_out)
    out = out_POR.view(shape) if num_rows == 1 else out_POR.view(num_out, num_rows).T.reshape(shape)
    return out if bias_O is None else out + bias_O
