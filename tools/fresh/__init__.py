# SPDX-License-Identifier: Apache-2.0
"""Try what a user does first on machines with nothing on them; needs root and Debian.

make fresh                  the README's first commands, in an empty Debian
make images                 the steps of tools/docker's Dockerfiles, and their commands
"""
