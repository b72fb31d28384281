"""What other programs need to know of our models: what they compute otherwise, and what they are given instead.

Reading order: servers (vLLM's and SGLang's transformers backends, and the errors of `transformers serve`), llama_cpp
(GGUF files), vllm_plugin (vLLM's native classes; vLLM imports it, and nothing here). Everything is read off a
configuration.
"""

from .llama_cpp import check_for_gguf, gguf_problems
from .servers import told_to_clients, warn_of_server

__all__ = ["check_for_gguf", "gguf_problems", "told_to_clients", "warn_of_server"]
