"""Federated data: recipes that divide a data set among clients, and federations of your own arrays."""

from bayesfl.data.arrays import from_arrays
from bayesfl.data.class_groups import dominant_classes, label_groups
from bayesfl.data.coloured import coloured, recoloured
from bayesfl.data.columns import Columns
from bayesfl.data.concept_shift import concept_drift, swapped_labels
from bayesfl.data.even import diabetes, iid
from bayesfl.data.federated import FederatedData
from bayesfl.data.framed import frame_statistics, from_frame
from bayesfl.data.label_skew import dirichlet, labels_per_client, pachinko, shards
from bayesfl.data.natural import heart_disease, shakespeare
from bayesfl.data.readers import load
from bayesfl.data.sets import from_datasets
from bayesfl.data.sources import Source, SourceInfo, available
from bayesfl.data.split import ClientData
from bayesfl.data.synthetic import linear_mixture

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
