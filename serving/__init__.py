"""Adapters to servers.

Reading order: vllm_plugin (a plugin, which vLLM imports).
"""

__all__ = []
