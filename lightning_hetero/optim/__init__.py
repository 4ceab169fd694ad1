"""Update rules: Adam and AdamW in the native engine, other torch optimizers block by block."""
