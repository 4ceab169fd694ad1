"""Blocks while a model trains: their memory, the engine that moves and updates them, their mirrors."""
