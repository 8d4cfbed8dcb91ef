"""Published methods, one file each: a docstring with the paper's model, and a short composition of
blocks and phases.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from bayesfl.algorithms.apfl import apfl
from bayesfl.algorithms.bpfed import bpfed
from bayesfl.algorithms.clustered import clustered
from bayesfl.algorithms.ditto import ditto
from bayesfl.algorithms.fedamp import fedamp
from bayesfl.algorithms.fedavg import fedavg, fedavg_ft
from bayesfl.algorithms.fedbabu import fedbabu
from bayesfl.algorithms.fedbn import fedbn
from bayesfl.algorithms.fedem import d_fedem, fedem
from bayesfl.algorithms.fedep import fedep
from bayesfl.algorithms.fedfomo import fedfomo
from bayesfl.algorithms.fedivon import fedivon
from bayesfl.algorithms.fedpa import fedpa
from bayesfl.algorithms.fedpac import fedpac
from bayesfl.algorithms.fedper import fedper
from bayesfl.algorithms.fedpop import fedpop
from bayesfl.algorithms.fedprox import fedprox
from bayesfl.algorithms.fedrep import fedrep
from bayesfl.algorithms.fedrod import fedrod
from bayesfl.algorithms.fedsa_lora import fedsa_lora
from bayesfl.algorithms.fedsi import fedsi, fedsi_fac, fedsi_full
from bayesfl.algorithms.fola import fola
from bayesfl.algorithms.group_dro import group_dro
from bayesfl.algorithms.ifca import ifca
from bayesfl.algorithms.irm import irm, irm_ft, irm_l2
from bayesfl.algorithms.knn_per import knn_per
from bayesfl.algorithms.l2gd import l2gd
from bayesfl.algorithms.lg_fedavg import lg_fedavg
from bayesfl.algorithms.local import local
from bayesfl.algorithms.moon import moon
from bayesfl.algorithms.perinvfl import perinvfl
from bayesfl.algorithms.pfedbayes import pfedbayes
from bayesfl.algorithms.pfedhn import pfedhn
from bayesfl.algorithms.pfedmap import pfedmap
from bayesfl.algorithms.pfedme import pfedme
from bayesfl.algorithms.pfedvem import pfedvem, pfedvem_held
from bayesfl.algorithms.pvi import pvi
from bayesfl.algorithms.qlsd import qlsd
from bayesfl.algorithms.scaffold import scaffold
from bayesfl.composition import Algorithm

PAPERS: dict[str, tuple[Callable[..., Algorithm], str, str]] = {
    "local": (local, "Local", "-"),
    "fedavg": (fedavg, "FedAvg", "McMahan et al., AISTATS 2017"),
    "fedavg_ft": (fedavg_ft, "FedAvg-FT", "Marfoq et al., NeurIPS 2021 (FedAvg+)"),
    "knn_per": (knn_per, "kNN-Per", "Marfoq, Neglia, Kameni, Vidal, ICML 2022"),
    "fedprox": (fedprox, "FedProx", "Li et al., MLSys 2020"),
    "fedpa": (fedpa, "FedPA", "Al-Shedivat et al., ICLR 2021"),
    "scaffold": (scaffold, "SCAFFOLD", "Karimireddy et al., ICML 2020"),
    "moon": (moon, "MOON", "Li, He, Song, CVPR 2021"),
    "fedper": (fedper, "FedPer", "Arivazhagan et al., 2019"),
    "fedrep": (fedrep, "FedRep", "Collins et al., ICML 2021"),
    "fedpac": (fedpac, "FedPAC", "Xu, Tong, Huang, ICLR 2023"),
    "fedrod": (fedrod, "Fed-RoD", "Chen, Chao, ICLR 2022"),
    "lg_fedavg": (lg_fedavg, "LG-FedAvg", "Liang et al., 2020"),
    "fedsa_lora": (fedsa_lora, "FedSA-LoRA", "Guo et al., ICLR 2025"),
    "fedbabu": (fedbabu, "FedBABU", "Oh, Kim, Yun, ICLR 2022"),
    "fedbn": (fedbn, "FedBN", "Li, Jiang, Zhang, Kamp, Dou, ICLR 2021"),
    "ditto": (ditto, "Ditto", "Li et al., ICML 2021"),
    "pfedme": (pfedme, "pFedMe", "Dinh, Tran, Nguyen, NeurIPS 2020"),
    "l2gd": (l2gd, "L2GD", "Hanzely, Richtárik, 2020"),
    "apfl": (apfl, "APFL", "Deng, Kamani, Mahdavi, 2020"),
    "fedamp": (fedamp, "FedAMP", "Huang et al., AAAI 2021"),
    "fedfomo": (fedfomo, "FedFomo", "Zhang, Sapra, Fidler, Yeung, Alvarez, ICLR 2021"),
    "pfedhn": (pfedhn, "pFedHN", "Shamsian, Navon, Fetaya, Chechik, ICML 2021"),
    "pfedbayes": (pfedbayes, "pFedBayes", "Zhang et al., ICML 2022"),
    "bpfed": (bpfed, "BPFed", "Chen, Liu, Cao, Zhang, 2023"),
    "fedpop": (fedpop, "FedPop", "Kotelevskii, Vono, Moulines, Durmus, NeurIPS 2022"),
    "fola": (fola, "FOLA", "Liu et al., TPAMI 2023"),
    "fedivon": (fedivon, "FedIVON", "Pal, Gupta, Sarwar, Rai, TMLR 2025"),
    "qlsd": (qlsd, "QLSD", "Vono, Plassier, Durmus, Dieuleveut, Moulines, AISTATS 2022"),
    "pvi": (pvi, "PVI", "Ashman et al., 2022"),
    "fedep": (fedep, "FedEP", "Guo et al., ICLR 2023"),
    "pfedmap": (pfedmap, "pFedMAP", "Zhu, Ma, Blaschko, FL-NeurIPS 2022"),
    "pfedvem": (pfedvem, "pFedVEM", "Zhu, Ma, Blaschko, FL-NeurIPS 2022"),
    "pfedvem_held": (
        pfedvem_held,
        "pFedVEM, fixed variances",
        "after Zhu, Ma, Blaschko, FL-NeurIPS 2022",
    ),
    "clustered": (clustered, "Clustered FL", "Sattler, Müller, Samek, TNNLS 2021"),
    "ifca": (ifca, "IFCA", "Ghosh et al., NeurIPS 2020"),
    "fedem": (fedem, "FedEM", "Marfoq et al., NeurIPS 2021"),
    "d_fedem": (d_fedem, "D-FedEM", "Marfoq et al., NeurIPS 2021"),
    "irm": (irm, "IRM", "Arjovsky et al., 2019"),
    "group_dro": (group_dro, "GroupDRO", "Sagawa et al., ICLR 2020"),
    "irm_l2": (irm_l2, "IRM-L2", "Tang, Guo, Zhang, 2022"),
    "irm_ft": (irm_ft, "IRM-FT", "Tang, Guo, Zhang, 2022"),
    "perinvfl": (perinvfl, "PerInvFL", "Tang, Guo, Zhang, 2022"),
    "fedsi": (fedsi, "FedSI", "Chen, Liu, Wu, Fan, Cao, 2024"),
    "fedsi_fac": (fedsi_fac, "FedSI-Fac", "Chen, Liu, Wu, Fan, Cao, 2024"),
    "fedsi_full": (fedsi_full, "FedSI, whole body", "after Chen, Liu, Wu, Fan, Cao, 2024"),
}
"""Name in code -> (function that makes the method, its printed name, its paper)."""


class Entry(NamedTuple):
    """Hold a row of the table of implemented methods: the function in `bayesfl.algorithms`, the
    method's printed name, and its paper.

    Further columns, as text: the class of a client's posterior of each block, the tensors that a
    client sends each round, and the state that stays there.

    Example:
        >>> by_name = {entry.name: entry for entry in bf.algorithms.available()}
        >>> by_name["fedper"].sent, by_name["fedper"].private
        ('body', 'head')
    """

    name: str
    title: str
    paper: str
    posterior: str
    sent: str
    private: str


def available() -> list[Entry]:
    """Return the table of implemented methods, read from the compositions themselves.

    Example:
        >>> row = bf.algorithms.available()[0]
        >>> row.title, row.sent
        ('Local', 'nothing')
    """
    from bayesfl.models import SplitModel, mlp

    entries = []
    plain = mlp(2, hidden=2, outputs=2)
    normed = SplitModel(nn.Sequential(plain.body, nn.BatchNorm1d(2)), plain.head)
    adapted = nn.Sequential(OrderedDict(lora_A=nn.Linear(2, 2), lora_B=nn.Linear(2, 2)))
    for name, (make, title, paper) in PAPERS.items():
        algorithm = make({fedbn: normed, fedsa_lora: adapted}.get(make, plain))
        server = algorithm.init(1)
        rows = algorithm.rows(server)
        beliefs = [
            f"{block}: {type(b.posterior).__name__}" for block, b in algorithm.blocks.items()
        ]
        if algorithm.predictor is not None:
            beliefs.append(f"predicts by {type(algorithm.predictor).__name__}")
        kept = []
        for block, b in algorithm.blocks.items():
            stays = set(rows.get(block, ())) - set(b.pool.sends if b.pool else ())
            if stays:
                kept.append(block if b.private else f"{block} ({', '.join(sorted(stays))})")
        sent = [key.removesuffix(".loc") for key in algorithm.uplink(server)]
        entries.append(
            Entry(
                name,
                title,
                paper,
                ", ".join(beliefs),
                ", ".join(sent) or "nothing",
                ", ".join(kept) or "nothing",
            )
        )
    return entries


__all__ = [
    "PAPERS",
    "Entry",
    "apfl",
    "available",
    "bpfed",
    "clustered",
    "d_fedem",
    "ditto",
    "fedamp",
    "fedavg",
    "fedavg_ft",
    "fedbabu",
    "fedbn",
    "fedem",
    "fedep",
    "fedfomo",
    "fedivon",
    "fedpa",
    "fedpac",
    "fedper",
    "fedpop",
    "fedprox",
    "fedrep",
    "fedrod",
    "fedsa_lora",
    "fedsi",
    "fedsi_fac",
    "fedsi_full",
    "fola",
    "group_dro",
    "ifca",
    "irm",
    "irm_ft",
    "irm_l2",
    "knn_per",
    "l2gd",
    "lg_fedavg",
    "local",
    "moon",
    "perinvfl",
    "pfedbayes",
    "pfedhn",
    "pfedmap",
    "pfedme",
    "pfedvem",
    "pfedvem_held",
    "pvi",
    "qlsd",
    "scaffold",
]


def __dir__() -> list[str]:
    return sorted(__all__)
