//! Where files and batches are stored, as it is configured.

use std::path::PathBuf;
use std::str::FromStr;

const SCHEME: &str = "s3://";

/// A folder, or a prefix of a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreLocation {
    Folder(PathBuf),
    Bucket(BucketPrefix),
}

/// `s3://BUCKET/PREFIX`; all keys are below the prefix, which may be empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketPrefix {
    pub bucket: String,
    pub prefix: String,
}

/// A setting that is not a location.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a place for files and batches: {reason}; give a folder, or s3://BUCKET/PREFIX")]
pub struct InvalidLocation {
    text: String,
    reason: &'static str,
}

impl FromStr for StoreLocation {
    type Err = InvalidLocation;

    fn from_str(text: &str) -> Result<Self, InvalidLocation> {
        let invalid = |reason| InvalidLocation { text: text.to_owned(), reason };
        let Some(place) = text.strip_prefix(SCHEME) else {
            return match text.split_once("://") {
                Some(_) => Err(invalid("the only scheme is s3")),
                None if text.is_empty() => Err(invalid("it is empty")),
                None => Ok(Self::Folder(PathBuf::from(text))),
            };
        };
        let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
        let is_plain = |part: &str| {
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
            !matches!(part, "" | "." | "..") && part.bytes().all(is_plain)
        };
        if !is_plain(bucket) {
            return Err(invalid("the bucket's name has letters, digits, `-`, `_` and `.`"));
        }
        let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
        if !prefix.is_empty() && !prefix.split('/').all(is_plain) {
            return Err(invalid("each part of the prefix has letters, digits, `-`, `_` and `.`"));
        }
        Ok(Self::Bucket(BucketPrefix { bucket: bucket.to_owned(), prefix: prefix.to_owned() }))
    }
}

impl std::fmt::Display for StoreLocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Folder(path) => path.display().fmt(f),
            Self::Bucket(place) => place.fmt(f),
        }
    }
}

impl std::fmt::Display for BucketPrefix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.bucket, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(bucket: &str, prefix: &str) -> StoreLocation {
        StoreLocation::Bucket(BucketPrefix { bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }

    #[test]
    fn folders_and_buckets_are_distinguished() {
        for (text, expected) in [
            ("/data/batches", StoreLocation::Folder("/data/batches".into())),
            ("s3", StoreLocation::Folder("s3".into())),
            ("s3://b", bucket("b", "")),
            ("s3://my.bucket-1/", bucket("my.bucket-1", "")),
            ("s3://b/a/b_c/", bucket("b", "a/b_c")),
        ] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        for text in
            ["", "s3://", "s3:///a", "gs://b", "https://b/c", "s3://b/a//b", "s3://b/../c", "s3://b c"]
        {
            let error = text.parse::<StoreLocation>().unwrap_err().to_string();
            assert!(error.contains("s3://BUCKET/PREFIX"), "{error}");
        }
    }
}
