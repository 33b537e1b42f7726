//! Client of Mooncake's HTTP metadata server.

use std::sync::Arc;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::{Method, StatusCode};

use super::{DirectoryError, MetadataServerError};
use crate::descriptor::{MAX_DESCRIPTOR, RpcMeta, SegmentDescriptor};

/// Servers store keys unmodified, so keys are escaped exactly as Mooncake's nodes escape them: everything except unreserved characters.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

#[derive(Debug)]
pub(super) struct HttpDirectory {
    url: String,
    /// Cluster id followed by a slash, or empty.
    cluster: String,
    http: reqwest::Client,
}

impl HttpDirectory {
    pub(super) fn new(
        url: &str,
        cluster: Option<&str>,
        http: reqwest::ClientBuilder,
    ) -> Result<Self, DirectoryError> {
        let http = http.build().map_err(|error| failed("GET", url, error))?;
        let cluster = cluster.filter(|id| !id.is_empty()).map(|id| format!("{id}/")).unwrap_or_default();
        Ok(Self { url: url.to_owned(), cluster, http })
    }

    pub(super) async fn descriptor(&self, name: &str) -> Result<Vec<u8>, DirectoryError> {
        self.get(&self.key("ram", name)).await?.ok_or_else(|| DirectoryError::NotFound(name.to_owned()))
    }

    pub(super) async fn rpc(&self, name: &str) -> Result<Option<RpcMeta>, DirectoryError> {
        let Some(json) = self.get(&self.key("rpc_meta", name)).await? else { return Ok(None) };
        serde_json::from_slice(&json).map(Some).map_err(|error| DirectoryError::malformed(name, error))
    }

    pub(super) async fn publish(
        &self,
        descriptor: &SegmentDescriptor,
        rpc: &RpcMeta,
    ) -> Result<(), DirectoryError> {
        self.publish_rpc(&descriptor.name, rpc).await?;
        let json = json(&descriptor.name, descriptor)?;
        let url = self.key("ram", &descriptor.name);
        let (status, body_text) = self.send(Method::PUT, "PUT", &url, Some(json)).await?;
        if status.is_success() { Ok(()) } else { Err(unexpected("PUT", &url, status, &body_text)) }
    }

    pub(super) async fn unpublish(&self, name: &str) -> Result<(), DirectoryError> {
        for kind in ["ram", "rpc_meta"] {
            self.delete(&self.key(kind, name)).await?;
        }
        Ok(())
    }

    /// Servers do not overwrite this entry. A stale one of the same name and host is deleted first.
    async fn publish_rpc(&self, name: &str, rpc: &RpcMeta) -> Result<(), DirectoryError> {
        let url = self.key("rpc_meta", name);
        if let Some(stored) = self.get(&url).await? {
            match serde_json::from_slice::<RpcMeta>(&stored) {
                Ok(stored) if stored == *rpc => return Ok(()),
                Ok(stored) if stored.ip_or_host_name != rpc.ip_or_host_name => {
                    return Err(DirectoryError::NameConflict { name: name.to_owned(), at: stored.address() });
                }
                _ => self.delete(&url).await?,
            }
        }
        let (status, body_text) = self.send(Method::PUT, "PUT", &url, Some(json(name, rpc)?)).await?;
        if status.is_success() { Ok(()) } else { Err(unexpected("PUT", &url, status, &body_text)) }
    }

    async fn get(&self, url: &str) -> Result<Option<Vec<u8>>, DirectoryError> {
        match self.send(Method::GET, "GET", url, None).await? {
            (StatusCode::NOT_FOUND, _) => Ok(None),
            (status, body) if status.is_success() => Ok(Some(body)),
            (status, body_text) => Err(unexpected("GET", url, status, &body_text)),
        }
    }

    async fn delete(&self, url: &str) -> Result<(), DirectoryError> {
        match self.send(Method::DELETE, "DELETE", url, None).await? {
            (status, _) if status.is_success() || status == StatusCode::NOT_FOUND => Ok(()),
            (status, body_text) => Err(unexpected("DELETE", url, status, &body_text)),
        }
    }

    async fn send(
        &self,
        method: Method,
        name: &'static str,
        url: &str,
        body: Option<Vec<u8>>,
    ) -> Result<(StatusCode, Vec<u8>), DirectoryError> {
        let mut request = self.http.request(method, url);
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body);
        }
        let mut response = request.send().await.map_err(|error| failed(name, url, error))?;
        let mut body = Vec::new();
        while let Some(part) = response.chunk().await.map_err(|error| failed(name, url, error))? {
            if body.len() + part.len() > MAX_DESCRIPTOR {
                let source = MetadataServerError::TooLarge;
                return Err(DirectoryError::Server { method: name, url: url.to_owned(), source });
            }
            body.extend_from_slice(&part);
        }
        Ok((response.status(), body))
    }

    /// URL of an entry on the metadata server.
    fn key(&self, kind: &str, name: &str) -> String {
        let key = format!("mooncake/{}{kind}/{name}", self.cluster);
        format!("{}?key={}", self.url, utf8_percent_encode(&key, ESCAPED))
    }
}

fn json(name: &str, value: &impl serde::Serialize) -> Result<Vec<u8>, DirectoryError> {
    serde_json::to_vec(value).map_err(|error| DirectoryError::malformed(name, error))
}

fn failed(method: &'static str, url: &str, error: reqwest::Error) -> DirectoryError {
    let source = MetadataServerError::Http(Arc::new(error));
    DirectoryError::Server { method, url: url.to_owned(), source }
}

fn unexpected(method: &'static str, url: &str, status: StatusCode, body_text: &[u8]) -> DirectoryError {
    let body_text = String::from_utf8_lossy(body_text).chars().take(200).collect();
    let source = MetadataServerError::Status(status, body_text);
    DirectoryError::Server { method, url: url.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_match_those_of_mooncake_nodes() {
        let url = |cluster| {
            HttpDirectory::new("http://m:8080/metadata", cluster, moongate_runtime::plain_http_client())
                .unwrap()
                .key("ram", "127.0.0.1:13102")
        };
        let plain = "http://m:8080/metadata?key=mooncake%2Fram%2F127.0.0.1%3A13102";
        assert_eq!(url(None), plain);
        assert_eq!(url(Some("")), plain);
        assert_eq!(url(Some("blue")), "http://m:8080/metadata?key=mooncake%2Fblue%2Fram%2F127.0.0.1%3A13102");
    }
}
