"""`vcli launch`: one node of a deployment. The same code and flags as `serve`."""

from typing import Final

LAUNCH_HELP: Final = """Run one node of a model over several: node 0 serves, the others follow.

Type it on every node with the same flags but --node-rank; the nodes wait for each other.

Example:  vcli launch -n 2 -r 0 --master-addr 10.0.0.1 -tp 8 -pp 2 ./Qwen3-32B
"""
