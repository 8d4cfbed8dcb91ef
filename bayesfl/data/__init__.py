"""Federated data: recipes that divide a data set among clients, and federations of your own
arrays.
"""

from bayesfl.data.federated import FederatedData
from bayesfl.data.own.arrays import from_arrays
from bayesfl.data.own.from_frame import frame_statistics, from_frame
from bayesfl.data.own.sets import from_datasets
from bayesfl.data.recipes.class_groups import dominant_classes, label_groups
from bayesfl.data.recipes.coloured import coloured, recoloured
from bayesfl.data.recipes.concept_shift import concept_drift, swapped_labels
from bayesfl.data.recipes.even import diabetes, iid
from bayesfl.data.recipes.label_skew import dirichlet, labels_per_client, pachinko, shards
from bayesfl.data.recipes.natural import heart_disease, shakespeare
from bayesfl.data.recipes.readers import load
from bayesfl.data.recipes.synthetic import linear_mixture
from bayesfl.data.sources import Source, SourceInfo, available
from bayesfl.data.split import ClientData
from bayesfl.data.tables.columns import Columns

__all__ = [
    "ClientData",
    "Columns",
    "FederatedData",
    "Source",
    "SourceInfo",
    "available",
    "coloured",
    "concept_drift",
    "diabetes",
    "dirichlet",
    "dominant_classes",
    "frame_statistics",
    "from_arrays",
    "from_datasets",
    "from_frame",
    "heart_disease",
    "iid",
    "label_groups",
    "labels_per_client",
    "linear_mixture",
    "load",
    "pachinko",
    "recoloured",
    "shakespeare",
    "shards",
    "swapped_labels",
]
