"""The foundation of all other folders: shared types, addressed randomness, files, and checks of
arguments.
"""
