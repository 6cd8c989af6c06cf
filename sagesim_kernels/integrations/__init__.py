"""Integrations into other frameworks: one module a framework, which users import by its name.

Importing a module registers nothing; registering is a call, and each module has a call that undoes
it. (torchtitan imports its module when a command names it, and then lists the override.) On CUDA
devices the kernels compute; elsewhere the emulator does (see `attend`), except in `torch_flash`,
which computes on CUDA devices only.
"""
