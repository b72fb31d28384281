"""The page of `llamoe chat`: a conversation with a model, and the experts that computed each token.

Reading order: chat_model (generates answers), expert_record (the experts of an answer), expert_view (a record as
pictures and tables), layout (the components of the page), serve (starts and ends the page).

Importing these modules takes seconds, since they need torch, transformers and gradio; the command does it last.
"""
