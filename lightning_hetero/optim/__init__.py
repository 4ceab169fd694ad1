"""Update rules over a store: Adam and AdamW in the native engine, every other torch optimizer block by block."""
