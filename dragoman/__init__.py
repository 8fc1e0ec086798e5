"""Encoder-decoder Transformers, trained, exported, served and called."""
