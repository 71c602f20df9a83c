# Adapters to training frameworks, one a module: each imports its framework, none is imported by anything else.
