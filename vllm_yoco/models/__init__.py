"""The plugin's own model family, ``model_type: "yoco"``: config, vLLM model, model state and a dense reference."""
