"""Model definitions: layers, attention, the dense transformer, the LM head, and their cost."""
