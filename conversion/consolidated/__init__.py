"""Code shared by Meta's and Mistral AI's folders: params.json and consolidated weight files.

Reading order: params, folder.
"""

from .folder import Files, is_tuned, measure, open_files, read_tensors, weight_files
from .params import KEPT, Params, kept_fields, naming, read_decoder, read_dtype, read_kept
