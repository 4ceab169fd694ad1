"""Where blocks live: their cut, their memory, their files, and the engine that moves and updates them."""
