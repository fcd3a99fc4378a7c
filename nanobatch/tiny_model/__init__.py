"""The bundled model: a byte-level Llama with a million parameters that writes short stories.

grammar.py           the stories it was trained on, as a grammar
train.py             the script that trained it
config.json, generation_config.json, model.safetensors
                     what train.py wrote: a Hugging Face model directory
"""
