"""Checkpoint folders in Mistral AI's own format: params.json beside consolidated weights, of Mistral and Mixtral.

Reading order: params, folder.
"""

from .folder import is_mistral, open_mistral
