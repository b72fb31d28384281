"""Adapters to servers.

Reading order: client_errors (for `transformers serve`), vllm_plugin (a plugin, which vLLM imports).
"""

from .client_errors import report_to_client

__all__ = ["report_to_client"]
