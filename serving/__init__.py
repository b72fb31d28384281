"""The plugin with which vLLM serves llamoe's models; `vllm_plugin` is the only file."""

__all__ = []
