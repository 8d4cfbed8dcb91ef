"""The data sets that recipes divide: the type `Source`, and a list of those known, with their
licences.
"""

from dataclasses import dataclass

from torch import Tensor

from bayesfl.base.targets import Task

LABEL_REMEDY = (
    "number the classes from 0 up, or pass outputs= one above the largest; leave out examples "
    "without a label, or put -100 in place of one of several labels of an example"
)
"""Remedy in messages about labels that are no classes."""


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """The origin of a data set, and its terms.

    Args:
        name: The data set's name.
        licence: The licence as the origin states it.
        citation: The publication that its authors ask users to cite.
        url: Address where it is published.

    Example:
        >>> bf.data.SourceInfo(name="wards", licence="internal").name
        'wards'
    """

    name: str
    licence: str = "not stated"
    citation: str = ""
    url: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Source:
    """A data set: the training rows first, then the test rows, in tensors that every partition of
    it shares.

    Args:
        x: Inputs [N, ...], one tensor, of any real dtype; one in a mapped file stays there. Of the
            library's own, images are standardised already by their usual mean and deviation, and
            the columns of `diabetes` by those of the training rows; `digits` lie within [0, 1].
        y: Class labels [N] int64, or targets [N] or [N, O] float32.
        train: Number of training rows, which come first.
        outputs: Number of classes or targets.
        task: `classification` or `regression`.
        info: Name, licence and citation.
        class_names: One name for each class; None for classes without names.
        superclasses: Classes grouped by meaning, in groups of one size; None for no groups.
        superclass_names: One name for each group.
        owners: Place of origin of each row, [N] int64, an index into `owner_names`; None for data
            of one place.
        owner_names: One name for each place.
        scale: Mean and standard deviation of regression targets before they were standardised; None
            for others.

    Raises:
        TypeError: `class_names` is no list.
        ValueError: `x` and `y` have different numbers of rows, `train` is out of range, a label is
            outside [0, `outputs`), or there is not one name for each class.

    Example:
        >>> x, y = torch.rand(20, 3), torch.arange(20) % 2
        >>> about = {"task": "classification", "info": bf.data.SourceInfo(name="mine")}
        >>> source = bf.data.Source(x=x, y=y, train=15, outputs=2, **about)
        >>> bf.data.iid(source, clients=2)
        FederatedData(mine, 2 clients; train 15, test 5)
    """

    x: Tensor
    y: Tensor
    train: int
    outputs: int
    task: Task
    info: SourceInfo
    class_names: tuple[str, ...] | None = None
    superclasses: tuple[tuple[int, ...], ...] | None = None
    superclass_names: tuple[str, ...] | None = None
    owners: Tensor | None = None
    owner_names: tuple[str, ...] = ()
    scale: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.task == "classification":
            wrong = ((self.y < 0) | (self.y >= self.outputs)).nonzero()
            if len(wrong):
                row = int(wrong[0, 0])
                raise ValueError(
                    f"labels must lie within [0, {self.outputs}), y has {int(self.y[row])} in row "
                    f"{row}: {LABEL_REMEDY}"
                )


_KRIZHEVSKY = (
    "A. Krizhevsky, Learning multiple layers of features from tiny images, technical report, "
    "University of Toronto, 2009"
)
_CIFAR = "https://www.cs.toronto.edu/~kriz/cifar.html"

INFO = {
    info.name: info
    for info in (
        SourceInfo(
            name="digits",
            licence="CC BY 4.0",
            citation="E. Alpaydin, C. Kaynak, Optical recognition of handwritten digits, UCI "
            "Machine Learning Repository, 1998, doi 10.24432/C50P49; the test part, as "
            "scikit-learn ships it",
            url="https://archive.ics.uci.edu/dataset/80",
        ),
        SourceInfo(
            name="mnist",
            licence="often given as CC BY-SA 3.0",
            citation="Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, Gradient-based learning applied "
            "to document recognition, Proc. IEEE 86(11), 1998",
            url="http://yann.lecun.com/exdb/mnist/",
        ),
        SourceInfo(
            name="fashion-mnist",
            licence="MIT, (c) 2017 Zalando SE",
            citation="H. Xiao, K. Rasul, R. Vollgraf, Fashion-MNIST: a novel image dataset for "
            "benchmarking machine learning algorithms, arXiv:1708.07747",
            url="https://github.com/zalandoresearch/fashion-mnist",
        ),
        SourceInfo(
            name="cifar10",
            licence="not stated; the authors ask to be cited",
            citation=_KRIZHEVSKY,
            url=_CIFAR,
        ),
        SourceInfo(
            name="cifar100",
            licence="not stated; the authors ask to be cited",
            citation=_KRIZHEVSKY,
            url=_CIFAR,
        ),
        SourceInfo(
            name="emnist-letters",
            citation="G. Cohen, S. Afshar, J. Tapson, A. van Schaik, EMNIST: an extension of MNIST "
            "to handwritten letters, arXiv:1702.05373, 2017",
            url="https://www.nist.gov/itl/products-and-services/emnist-dataset",
        ),
        SourceInfo(
            name="shakespeare",
            licence="public domain",
            citation="W. Shakespeare, the plays of the Complete Moby Shakespeare",
            url="https://www.gutenberg.org/ebooks/3201",
        ),
        SourceInfo(
            name="heart",
            licence="CC BY 4.0; the four investigators ask to be named",
            citation="A. Janosi, W. Steinbrunn, M. Pfisterer, R. Detrano, Heart disease, UCI "
            "Machine Learning Repository, 1988, doi 10.24432/C52P4X",
            url="https://archive.ics.uci.edu/dataset/45",
        ),
        SourceInfo(
            name="diabetes",
            citation="B. Efron, T. Hastie, I. Johnstone, R. Tibshirani, Least angle regression, "
            "Annals of Statistics 32(2), 2004",
            url="https://www4.stat.ncsu.edu/~boos/var.select/diabetes.html",
        ),
    )
}


def available() -> dict[str, SourceInfo]:
    """Return every data set of `load` and the recipes, by name, with its licence and citation.

    Example:
        >>> "digits" in bf.data.available()
        True
    """
    return dict(INFO)
