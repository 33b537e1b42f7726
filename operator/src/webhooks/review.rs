//! Requests of the API server and their responses: `ConversionReview` of `apiextensions.k8s.io/v1`, `AdmissionReview` of
//! `admission.k8s.io/v1`.

use std::fmt::Display;

use kube::core::Status;
use kube::core::conversion::{
    ConversionRequest, ConversionResponse, ConversionReview, ConvertConversionReviewError,
};
use kube::core::gvk::GroupVersionKind;
use rbg_api::conversion::{ApiVersion, ConversionError, convert};
use serde::Deserialize;
use serde_json::{Value, json};

/// A body that is no review.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReviewParseError {
    #[error("the body is not a valid {review}: {source}")]
    NotJson { review: &'static str, source: serde_json::Error },
    #[error("the body is not a valid ConversionReview: {0}")]
    NoRequest(#[from] ConvertConversionReviewError),
}

impl ReviewParseError {
    fn of(review: &'static str) -> impl Fn(serde_json::Error) -> Self {
        move |source| Self::NotJson { review, source }
    }
}

/// Converts all objects of the review to the requested version, or none; also returns the metric label of the result.
pub(super) fn convert_review(body: &[u8]) -> Result<(&'static str, ConversionReview), ReviewParseError> {
    let review: ConversionReview =
        serde_json::from_slice(body).map_err(ReviewParseError::of("ConversionReview"))?;
    let mut request = ConversionRequest::from_review(review)?;
    let objects = std::mem::take(&mut request.objects);
    let all = ApiVersion::parse(&request.desired_api_version)
        .ok_or_else(|| ConversionError::Version(request.desired_api_version.clone()))
        .and_then(|version| objects.iter().map(|object| convert(object, version)).collect());
    let response = ConversionResponse::for_request(request);
    let (result, response) = match all {
        Ok(objects) => ("converted", response.success(objects)),
        Err(error) => {
            tracing::warn!(%error, "cannot convert an object");
            ("refused", response.failure(Status::failure(&error.to_string(), "BadRequest")))
        }
    };
    Ok((result, response.into_review()))
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AdmissionReviewRequest {
    uid: String,
    /// Kind of the new and the stored object.
    pub(super) kind: GroupVersionKind,
    #[serde(default)]
    pub(super) namespace: String,
    #[serde(default)]
    pub(super) object: Value,
    /// The stored object; null if the object is new.
    #[serde(default)]
    pub(super) old_object: Value,
}

impl AdmissionReviewRequest {
    pub(super) fn parse(body: &[u8]) -> Result<Self, ReviewParseError> {
        #[derive(Deserialize)]
        struct AdmissionReview {
            request: AdmissionReviewRequest,
        }
        let review: AdmissionReview =
            serde_json::from_slice(body).map_err(ReviewParseError::of("AdmissionReview"))?;
        Ok(review.request)
    }

    /// The response: allowed, or denied with these errors.
    pub(super) fn to_response<T: Display>(&self, errors: &[T]) -> Value {
        let mut response = json!({ "uid": self.uid, "allowed": errors.is_empty() });
        if !errors.is_empty() {
            let texts: Vec<String> = errors.iter().map(T::to_string).collect();
            response["status"] =
                json!({ "status": "Failure", "reason": "Invalid", "code": 422, "message": texts.join("; ") });
        }
        json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response })
    }
}
