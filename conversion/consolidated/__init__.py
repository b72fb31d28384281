"""What Meta's and Mistral AI's folders share: params.json beside consolidated weight files.

Reading order: params, folder.
"""

from .folder import (
    Files,
    is_tuned,
    measure,
    open_files,
    read_tensors,
    tensors_with_head,
    weight_files,
    write_folder,
    write_tokenizer,
)
from .params import Params, kept_fields, naming, read_decoder, read_dtype, read_kept
