"""Speculative decoding: targets, drafters, trees, verification and the decode loop.

Knows no user interface and no database. Start reading at `engine/decode.py`.
"""
