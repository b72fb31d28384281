"""Importing this module repairs a fault of transformers 5.24, whose classes are the reference of many tests."""

from importlib.metadata import version

from transformers.modeling_outputs import MoeCausalLMOutputWithPast

if version("transformers").startswith("5.24."):
    # Llama4ForConditionalGeneration reads this field of its decoder's output, which lacks the field, and raises.
    MoeCausalLMOutputWithPast.image_outputs = None
