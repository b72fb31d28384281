"""The page of `llamoe chat`: a conversation with a model, and the experts that computed each token.

Reading order: expert_record (the experts of an answer), chat_model (generates answers), expert_view (a record as
pictures and tables), layout (the components of the page), serve (starts and ends the page).

Importing these modules takes seconds, since they import torch, transformers and gradio. So the command checks its
options first.
"""
