"""How weights travel from trainer rank 0 to engines: one file a channel, each with both of its sides.

broadcast   buckets over a process group of the trainer and its engines
folder      safetensors files of a version in a folder (`disk`), or in memory that the folder links to (`ipc`)
delta       what either of them carries where engines hold the version before: the items that changed
"""
