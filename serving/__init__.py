"""Adapters to servers.

Reading order: client_errors (for `transformers serve`), vllm_plugin (a plugin, which vLLM imports).
"""

__all__ = []
