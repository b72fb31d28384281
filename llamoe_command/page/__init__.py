"""The page of `llamoe chat`: a conversation with a model, and which experts computed it.

Reading order: chat_model (a model that answers), expert_record (which experts computed an answer), expert_view (that as
pictures and tables), layout (the page), serve (start to end).

The modules import torch, transformers and gradio, which takes seconds: the command imports them where it needs them.
"""
