"""Settings of other libraries as ours: DeepSpeed, FSDP, accelerate.

Reads texts and files, and needs neither torch nor those libraries.
"""
