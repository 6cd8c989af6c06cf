"""Integrations into other frameworks: one module a framework, which users import by its name.

Importing a module registers nothing; registering is a call. There is no integration yet;
CONTRIBUTING.md, "A framework", says what a module needs.
"""
