"""Helpers of the pages: plots, demos and controls that a page shows and nothing else needs.

These modules are written by hand and ship with the package, so that a page runs wherever the
package is installed. No module outside this folder imports them.
"""
