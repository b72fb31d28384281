"""transformers' own classes as tests compare with them: importing this mends what a release cannot do itself."""

from importlib.metadata import version

from transformers.modeling_outputs import MoeCausalLMOutputWithPast

if version("transformers").startswith("5.24."):
    # Its own Llama 4 class with pictures reads this field of its decoder's output, which has none, and raises.
    MoeCausalLMOutputWithPast.image_outputs = None
