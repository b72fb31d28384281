"""Serve llamoe's models by other programs.

Reading order: vllm_plugin (a plugin, which vLLM imports).
"""

__all__ = []
