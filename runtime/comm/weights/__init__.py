"""How weights travel from trainer ranks to engines: one file a channel, each with both of its sides.

broadcast   buckets over a process group of the trainer and its engines
folder      safetensors files of a version in a folder (`disk`), or in memory that the folder links to (`ipc`)
handles     memory that each trainer rank shares with the engine's rank on its device (`ipc` with SGLang)
delta       what either of them carries where engines hold the version before: the items that changed
loader      SGLang's side of it
"""
