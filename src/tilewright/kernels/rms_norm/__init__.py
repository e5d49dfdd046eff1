"""Root-mean-square normalisation. (Zhang & Sennrich 2019)"""
