"""Adapters to servers: `client_errors` for `transformers serve`, and the plugin `vllm_plugin`, which vLLM imports."""

from .client_errors import report_to_client

__all__ = ["report_to_client"]
